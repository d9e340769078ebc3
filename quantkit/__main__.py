"""``python -m quantkit``: the command line where its script is not on the path."""

from quantkit.cli.main import main

if __name__ == "__main__":
    main()
