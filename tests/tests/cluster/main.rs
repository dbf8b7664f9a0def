//! Berth's programs with an API server: `berth up` as a person meets it, the sidecars as programs, and the manifests of
//! `deploy/` with the roles that they need.

mod deploy;
mod sidecars;
mod up;
