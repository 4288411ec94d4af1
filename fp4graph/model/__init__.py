"""An applied model: prepared, captured, called, and explained."""
