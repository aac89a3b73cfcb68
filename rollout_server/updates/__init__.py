"""New policy versions on their way into the engine."""
