"""What carries an algorithm's trial groups to an executor, and its reports back."""
