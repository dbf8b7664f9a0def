//! Pods on an API server in process, with real containers.
