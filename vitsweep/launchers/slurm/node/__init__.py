"""What runs inside a job: one agent per node, and the coordinator on the first node."""
