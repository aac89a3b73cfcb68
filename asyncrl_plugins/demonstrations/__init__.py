"""Policy losses that learn from demonstrations beside what the policy samples."""
