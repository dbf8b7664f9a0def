module berth-testbed/hostpath

go 1.26.0
