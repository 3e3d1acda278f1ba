"""The service that owns part memory so that it outlives workers, and its client."""
