//! The service in process, as clients use it.
