"""One module per page: read the store, fill the page's context, render."""
