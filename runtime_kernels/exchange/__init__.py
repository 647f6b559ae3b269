"""Expert parallelism: tokens travel to the ranks that own their experts, and back."""
