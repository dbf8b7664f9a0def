//! The client against a real server, Ganesha, in every version that both speak.

mod files;
mod server;
