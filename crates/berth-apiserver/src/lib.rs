//! The embedded Kubernetes API: a durable, versioned, watchable store, and the REST verbs over it.
//!
//! This is not a general Kubernetes: it serves the kinds that storage and workloads on one machine need, close enough to
//! kube-apiserver that kubectl, kube-rs, client-go and controllers of other projects work with it. The known differences from kube-apiserver
//! are listed in `DIFFERENCES.md`. An object is a JSON value from the wire to the disk; what its fields
//! are is known from one compact table ([`schema`]), which drives strict decoding, protobuf, strategic merge,
//! server-side apply and OpenAPI alike.
//!
//! ```text
//!  kubectl, client-go ──► server (TLS, identity) ──┐
//!  kube::Client in this process ───────────────────┴──► rest::ApiServer
//!                                                          │  path, parameters, formats    rest/{request,content}.rs
//!                                                          │  body → JSON value            rest/object.rs, schema/
//!                                                          │  patch                        patch/
//!                                                          │  defaults, admission, checks  rest/write.rs, rules/
//!                                                          ▼
//!                                  journal ◄── fsync ── store::Store ──► readers and watchers
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | [`server`] | the TLS listener: [`server::Server`] finds out who asks and adds an [`auth::Identity`] |
//! | [`auth`] | [`auth::Credentials`]: certificates, bearer tokens, and the files that hold them |
//! | [`rest`] | [`rest::ApiServer`], a tower service that answers requests; `kube::Client::new` takes it as it is |
//! | [`resource`], [`schema`] | which resources and subresources are served, and the fields of their types |
//! | `rules` | what is particular to a kind: defaults, validation, columns, selectors, as pure functions |
//! | [`patch`] | JSON patch, merge patch, strategic merge patch and server-side apply, as pure functions |
//! | [`store`] | [`store::Store`]: revisions, durability, lists at a revision, watches; it knows keys and bytes only |
//! | [`collect`] | deletes objects whose owners are gone and the contents of namespaces that are deleted |
//! | [`pods`] | the interface through which a node serves logs and exec |
//!
//! What holds:
//! - A write is on the disk before it is answered, and before any reader or watcher sees it.
//! - Revisions only grow, also over restarts, and every change has its own.
//! - A slow watcher keeps no memory occupied: when the events it needs have left the history, it gets 410 and lists again.
//! - Every request that comes over TLS is authenticated, except for health and version. Roles are stored, not enforced.
//! - A difference from kube-apiserver that is not listed in `DIFFERENCES.md` fails `tests/server/differential.rs`.
//!
//! Start reading at `rest.rs` for the way of a request, at `store.rs` for what is guaranteed about data. This is a whole
//! server, used without a socket:
//!
//! ```no_run
//! use berth_apiserver::{rest::{self, ApiServer}, store::{self, Store}};
//! use k8s_openapi::api::core::v1::ConfigMap;
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let (store, _) = Store::open("/var/lib/objects".as_ref(), store::Options::default())?;
//! let client = kube::Client::new(ApiServer::new(store, rest::Options::default()), "default");
//! let maps = kube::Api::<ConfigMap>::default_namespaced(client).list(&Default::default()).await?;
//! println!("{} ConfigMaps", maps.items.len());
//! # Ok(())
//! # }
//! ```

pub mod auth;
pub mod collect;
mod metrics;
pub mod patch;
pub mod pods;
pub mod resource;
pub mod rest;
mod rules;
pub mod schema;
pub mod server;
pub mod store;

#[doc(hidden)]
pub use rules::{FieldSelector, LabelSelector, parse_field_selector, parse_label_selector};
