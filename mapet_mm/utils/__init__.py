"""Files, configs, processes, errors and logs: what every part of the package uses."""
