"""Studies: what a published source printed, beside what a sweep measured. One file per source."""
