//! Looks at the storage of any cluster, with any CSI driver: the diagnosis behind `berth doctor` and `berth explain`, and the
//! views of it in the browser and in the terminal.
//!
//! ```text
//!  requests (ClusterState::read), or caches ──▶ ClusterState ──▶ diagnose ──▶ Vec<Finding> ──▶ doctor, explain, the page
//!                                                                   │ pure                 └─▶ fix::apply, for --fix
//!                                                 diagnose/{claims,pods,volumes,attachments,snapshots,drivers}.rs
//! ```
//!
//! - [`ClusterState`] holds what was observed: objects by kind and name, the events of each, and the time.
//! - [`diagnose()`] turns it into [`Finding`]s: what is wrong with which object, the evidence, the cause, what to do.
//! - [`explain::Subject`] narrows that down to one object and those that it is used with.
//! - [`fix`] does what a finding says is safe, after it has looked again.
//! - [`page`] is the web page, of a cluster or of a recording; [`top`] is the same in the terminal. Both show `rows` (one per volume, with its
//!   verdict) and `inventory` (nodes, drivers) of a `watched` cluster. [`records`] are what `berth up` keeps of volumes.
//!
//! Rules: this crate only reads, except for [`fix`] and the page's actions. A kind that may not be read is recorded as unknown, and nothing is concluded
//! from the absence of its objects. A driver, a sidecar or a node of another project is never assumed to behave like Berth's:
//! findings rest on what Kubernetes' API says. What only time can show (nobody took up a claim) is a finding after
//! [`ClusterState::patience`].
//!
//! Start reading at [`diagnose()`], then `diagnose/claims.rs`.

mod calls;
pub mod diagnose;
pub mod explain;
mod finding;
pub mod fix;
mod history;
mod inventory;
pub mod page;
pub mod records;
mod rows;
mod state;
pub mod top;
pub mod usage;
mod watched;
mod words;

pub use diagnose::diagnose;
pub use finding::{Finding, Fix, ObjectName, Severity, Trouble};
pub use state::{ClusterState, Events, Objects, PATIENCE, Unreadable, Usage, time_of};
pub use words::{counted, printable};
