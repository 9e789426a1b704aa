"""The target model's engine, and its service."""
