"""The demo: `shapebucket demo`."""
