//! The NFS driver as it is run: the controller as nobody, the node by FUSE, against a real server in user space.

mod allowed;
mod calls;
mod data;
mod hostile;
mod images;
mod sanity;
mod scene;
mod upstream;
mod world;
