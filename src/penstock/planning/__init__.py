"""Plans: how many nodes of which instance type each stage of a study gets, so that a deadline holds at least cost."""
