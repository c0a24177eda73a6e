"""How long a kernel takes, predicted from what it computes and where its operands are."""
