"""What runs on the cluster: the spec, the plan, the ledger, the engine and the Ray driver."""
