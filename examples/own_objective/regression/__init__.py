"""An objective of one's own."""
