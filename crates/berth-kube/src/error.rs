//! What can go wrong between a loop and Kubernetes.

/// A request that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused it, or could not be reached.
    #[error("{action} {kind} {name}")]
    Request {
        /// What was to be done: `patch`, `create`, …
        action: &'static str,
        /// The kind of the object.
        kind: String,
        /// Its name, with its namespace.
        name: String,
        /// The API server's answer.
        source: Box<kube::Error>,
    },
    /// An object could not be turned into JSON or back.
    #[error("encode or decode {kind} {name}")]
    Encode {
        /// The kind of the object.
        kind: String,
        /// Its name, with its namespace.
        name: String,
        /// Why serde could not encode or decode it.
        source: serde_json::Error,
    },
}

/// The result of a request.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The HTTP status of the answer, if there was one.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Request { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            Self::Encode { .. } => None,
        }
    }

    /// The reason in the answer, such as `AlreadyExists`; empty if there was none.
    pub fn reason(&self) -> &str {
        match self {
            Self::Request { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => &status.reason,
                _ => "",
            },
            Self::Encode { .. } => "",
        }
    }

    /// Somebody else changed the object first: read it again and decide anew.
    pub fn is_conflict(&self) -> bool {
        self.status() == Some(409) && self.reason() != "AlreadyExists"
    }

    /// The object is not there.
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(404)
    }

    /// An object of that name is there already.
    pub fn is_already_exists(&self) -> bool {
        self.reason() == "AlreadyExists"
    }

    /// The error and its causes in one sentence, for events and logs.
    pub fn chain(&self) -> String {
        berth_core::error_chain(self)
    }
}
