"""Where workers live: the only part that differs by place."""
