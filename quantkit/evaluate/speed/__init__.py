"""How fast a model is: ``bench`` times it, ``traffic`` counts the bytes a decode step reads, ``result`` shows both."""
