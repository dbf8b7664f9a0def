//! The volume manager on an API server in process, with kinds of volumes that fail on demand.
