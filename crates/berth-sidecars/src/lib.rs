//! The external components beside a CSI driver.
