//! The control loops of Kubernetes storage.
