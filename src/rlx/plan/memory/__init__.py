"""Memory of a plan: placement, budgets, values computed again, work in slices."""
