"""The tables that papers on small models on NPUs print, with this project's own numbers: one module for each page."""
