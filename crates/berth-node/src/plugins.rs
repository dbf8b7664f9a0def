//! The kinds of volumes that need no driver.

mod quantity;
