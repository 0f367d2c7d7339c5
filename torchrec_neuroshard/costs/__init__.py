"""Price the placement of a task by the phases of one training iteration."""
