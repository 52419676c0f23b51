"""What `import vitsweep` and the command line share: a sweep composed, planned, measured and read."""
