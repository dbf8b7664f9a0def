//! Upstream decision tables of the protections.
