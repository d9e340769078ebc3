"""Structure without weights. Imports core and checkpoint."""
