//! The external components beside a CSI driver.

pub mod registrar;
