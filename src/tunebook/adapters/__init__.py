"""One module per framework; import the module you use, as in `from tunebook.adapters.native import CLibrary`."""
