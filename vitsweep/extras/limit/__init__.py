"""`sweep.limit`: the largest value of a key that still trains, for each cell of a grid."""
