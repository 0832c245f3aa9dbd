"""The training itself, on each rank. (`paceline.train` is the function; a package of that name would hide it.)"""
