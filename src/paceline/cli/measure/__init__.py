"""The commands of the panel Measure: facts and speeds of a machine."""
