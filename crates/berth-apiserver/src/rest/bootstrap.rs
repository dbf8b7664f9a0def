//! What is there from the start: the namespaces of the system, and in every namespace its account and authority.

use serde_json::{Value, json};

use super::error::Answer;
use super::pipeline::Tracking;
use super::query::Query;
use super::{ApiServer, Failure};
use crate::store::{Collection, Key};

const NAMESPACES: &[&str] = &["default", "kube-node-lease", "kube-public", "kube-system"];

impl ApiServer {
    /// Makes the namespaces of the system, and what every namespace needs, if they are missing.
    pub async fn bootstrap(&self) -> Answer<()> {
        for &name in NAMESPACES {
            self.ensure("namespaces", "", name, json!({})).await?;
        }
        let names: Vec<String> = self
            .inner
            .store
            .view(&Collection::from("namespaces"))
            .range(None, None)
            .map(|object| object.key.name.to_string())
            .collect();
        for name in names {
            self.furnish(&name).await?;
        }
        Ok(())
    }

    /// Gives a namespace its default account, and the certificate by which programs in it know this server.
    pub(crate) async fn furnish(&self, namespace: &str) -> Answer<()> {
        self.ensure("serviceaccounts", namespace, "default", json!({})).await?;
        if let Some(credentials) = &self.inner.options.credentials {
            let data = json!({ "data": { "ca.crt": credentials.authority } });
            self.ensure("configmaps", namespace, "kube-root-ca.crt", data).await?;
        }
        Ok(())
    }

    async fn ensure(&self, plural: &str, namespace: &str, name: &str, mut object: Value) -> Answer<()> {
        let key = Key::new(Collection::from(plural), namespace, name);
        if self.inner.store.get(&key).is_some() {
            return Ok(());
        }
        let registry = self.registry();
        let served = registry.find("", "v1", plural).ok_or_else(Failure::no_such_path)?;
        object["apiVersion"] = "v1".into();
        object["kind"] = (&*served.resource.kind).into();
        object["metadata"] = json!({ "name": name });
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = namespace.into();
        }
        let call = self.internal(served.clone(), namespace, name);
        let options = Query::default().write_options("CreateOptions")?;
        match call.insert(object, &options, Tracking::Update).await {
            Ok(_) => Ok(()),
            // Somebody else was faster, or the namespace is on its way out.
            Err(failure) if matches!(failure.code, 403 | 404 | 409) => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}
