//! The backend against a real NFS server.
