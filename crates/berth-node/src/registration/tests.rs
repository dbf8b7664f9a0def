//! Drivers that join, leave and misbehave.
