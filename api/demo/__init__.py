"""The demo: engines, balancer, rollout player and judge. Shipped, and used by tests and the benchmark."""
