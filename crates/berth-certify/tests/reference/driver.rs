//! The reference driver: Berth's local driver behind a layer that breaks one rule.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use berth_backends::local::{Config, Kind, Local};
use berth_backends::services::{self, Mode};
use berth_csi::{AsBytes, CallLayer, Calls, Endpoint, Listener, Metrics};
use bytes::Bytes;
use parking_lot::Mutex;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use crate::switches::{self, Switch};

/// The environment variables that make this program a driver: the rule to break (empty for none), and where data is kept.
pub(crate) const SWITCH: &str = "BERTH_REFERENCE_SWITCH";
pub(crate) const DATA: &str = "BERTH_REFERENCE_DATA";
pub(crate) const IMAGE: &str = "BERTH_REFERENCE_IMAGE";

/// What the switches remember between two calls.
#[derive(Default)]
pub(crate) struct Memory {
    /// How often each method was called.
    pub(crate) counts: BTreeMap<String, u32>,
    /// Facts of this life of the process.
    pub(crate) facts: BTreeSet<String>,
    /// What is under way: method and what it is about.
    pub(crate) under_way: Vec<(String, String)>,
}

/// The driver with its switch.
pub(crate) struct Reference {
    pub(crate) memory: Mutex<Memory>,
    data: PathBuf,
    calls: Calls,
    switch: Option<Switch>,
}

impl Reference {
    /// How often this method was called, this call included.
    pub(crate) fn count(&self, method: &str) -> u32 {
        self.memory.lock().counts.get(method).copied().unwrap_or_default()
    }

    /// Notes a fact; whether it is new in this life of the process.
    pub(crate) fn note(&self, fact: String) -> bool {
        self.memory.lock().facts.insert(fact)
    }

    pub(crate) fn forget(&self, fact: &str) -> bool {
        self.memory.lock().facts.remove(fact)
    }

    pub(crate) fn knows(&self, fact: &str) -> bool {
        self.memory.lock().facts.contains(fact)
    }

    /// Notes a fact that a restart survives; whether an earlier life of the process noted it.
    pub(crate) fn noted_in_an_earlier_life(&self, fact: &str) -> bool {
        let path = self.data.with_extension("facts");
        let known = std::fs::read_to_string(&path).unwrap_or_default();
        if known.lines().any(|line| line == fact) {
            return !self.knows(fact);
        }
        self.note(fact.to_owned());
        std::fs::write(path, format!("{known}{fact}\n")).unwrap();
        false
    }

    /// Calls the driver without the switch.
    pub(crate) async fn inner(&self, path: &str, message: Bytes) -> Result<Bytes, Status> {
        let mut client = tonic::client::Grpc::new(self.calls.clone());
        client.ready().await.map_err(|error| Status::internal(error.to_string()))?;
        let path: PathAndQuery = path.parse().unwrap();
        client.unary(Request::new(message), path, AsBytes).await.map(Response::into_inner).map_err(|status| {
            Status::with_details(status.code(), status.message(), Bytes::copy_from_slice(status.details()))
        })
    }

    async fn call(&self, path: &str, message: Bytes) -> Result<Response<Bytes>, Status> {
        let method = path.rsplit('/').next().unwrap().to_owned();
        *self.memory.lock().counts.entry(method.clone()).or_default() += 1;
        let answer = match &self.switch {
            Some(switch) => (switch.run)(self, path.to_owned(), method, message).await,
            None => self.inner(path, message).await,
        };
        answer.map(Response::new)
    }
}

/// Serves the driver until it is killed.
pub(crate) fn serve(switch: &str) {
    let data = PathBuf::from(std::env::var_os(DATA).unwrap());
    let endpoint: Endpoint = std::env::var("CSI_ENDPOINT").unwrap().parse().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut config = Config::new(data.clone(), "certify-node".parse().unwrap());
        let is_image = std::env::var(IMAGE).is_ok_and(|value| !value.is_empty());
        config.kind = Some(if is_image { Kind::Image } else { Kind::Dir });
        config.attachment = true;
        // More than any check attaches at once, but the one of the limit.
        config.max_volumes = Some(20);
        let local = Local::open(config).await.unwrap();
        let driver =
            local.driver("reference.berth.dev", "1", Mode::All).open(services::Config::new(&data)).unwrap();
        driver.recover().await.unwrap();
        let layer = CallLayer::new(Metrics::unregistered("reference.berth.dev"), None);
        let calls = berth_csi::in_process(driver.routes(), &layer);
        let switch = (!switch.is_empty()).then(|| {
            switches::all()
                .into_iter()
                .find(|known| known.check == switch)
                .expect("the switch is in the table")
        });
        let reference = Arc::new(Reference { memory: Mutex::default(), data, calls: calls.clone(), switch });
        let answer = move |request: axum::extract::Request| {
            let (reference, mut calls) = (reference.clone(), calls.clone());
            async move {
                let path = request.uri().path().to_owned();
                if path.contains("SnapshotMetadata") {
                    // Streams are passed on as they are.
                    let request = request.map(tonic::body::Body::new);
                    return tower::Service::call(&mut calls, request).await.unwrap();
                }
                let service = tower::service_fn(move |request: Request<Bytes>| {
                    let (reference, path) = (reference.clone(), path.clone());
                    async move { reference.call(&path, request.into_inner()).await }
                });
                tonic::server::Grpc::new(AsBytes).unary(service, request).await
            }
        };
        let routes = Routes::from(axum::Router::new().fallback(answer));
        let listener = Listener::bind(&endpoint).await.unwrap();
        berth_csi::serve(listener, routes, layer, std::future::pending()).await.unwrap();
    });
}
