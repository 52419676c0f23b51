"""Records of another machine beside those of a sweep."""
