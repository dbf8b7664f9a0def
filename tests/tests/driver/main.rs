//! Berth's local driver as a program on its socket, on real disks: what it does with people's bytes, what it refuses, what is
//! left after `kill -9`, and csi-sanity; and programs as drivers. Drivers of clouds, on twins of
//! them.

mod bad_input;
mod cloud_faults;
mod clouds;
mod crash;
mod data;
mod dev;
mod exec;
mod new;
mod sanity;
