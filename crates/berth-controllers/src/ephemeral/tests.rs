//! Upstream decision tables of the ephemeral volume controller.
