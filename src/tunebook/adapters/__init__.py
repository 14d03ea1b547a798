"""One module per framework; import the one you use, as in `from tunebook.adapters.native import CLibrary`."""
