module berth-testbed/pause

go 1.26.0
