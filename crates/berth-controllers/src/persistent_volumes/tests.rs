//! Upstream decision tables.
