//! Questions that are answered and not stored: whose token is this, may I do that; and tokens for service accounts.

use berth_core::names::AUTHENTICATION_V1;
use http::Response;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::error::{Answer, Failure};
use super::object::{self, Expected};
use super::registry::Served;
use super::request::FieldValidation;
use super::{ApiServer, Body, Call, content};
use crate::auth::{Bindings, Bound, Claims, ISSUER, Identity, Refused};
use crate::resource::{Cause, CauseReason, Resource};
use crate::rules::read;
use crate::schema::{self, time};
use crate::store::{Collection, Key};

const HOUR: i64 = 3600;
const SHORTEST: i64 = 600;
const LONGEST: i64 = 1 << 32;

/// Whether a resource is a question.
pub(super) fn is_review(resource: &Resource) -> bool {
    matches!(&*resource.group, "authentication.k8s.io" | "authorization.k8s.io")
}

impl ApiServer {
    /// Who bears a service account token that is meant for one of `audiences` (for this server if there are none),
    /// and for which of them.
    pub fn authenticate(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<(Identity, Vec<String>), Refused> {
        let credentials = self.inner.options.credentials.as_ref().ok_or(Refused::Foreign)?;
        let own = [ISSUER.to_owned()];
        let audiences = if audiences.is_empty() { &own } else { audiences };
        let claims = credentials.tokens().verify(token, audiences, Timestamp::now().as_second())?;
        let namespace = &claims.kubernetes.namespace;
        let bound = [
            ("serviceaccounts", namespace.as_str(), Some(&claims.kubernetes.serviceaccount)),
            ("pods", namespace, claims.kubernetes.pod.as_ref()),
            ("secrets", namespace, claims.kubernetes.secret.as_ref()),
            ("nodes", "", claims.kubernetes.node.as_ref()),
        ];
        for (plural, namespace, bound) in bound {
            let Some(bound) = bound else { continue };
            if self.uid_of(plural, namespace, &bound.name).as_deref() != Some(&bound.uid) {
                return Err(Refused::Unbound);
            }
        }
        let common = audiences.iter().filter(|audience| claims.aud.contains(audience)).cloned().collect();
        Ok((claims.identity(), common))
    }

    fn uid_of(&self, plural: &str, namespace: &str, name: &str) -> Option<String> {
        let object = self.inner.store.get(&Key::new(Collection::from(plural), namespace, name))?;
        let value: Value = serde_json::from_slice(&object.bytes).ok()?;
        Some(object::text(&value, "uid").to_owned())
    }

    /// A request of the server's own for one object.
    pub(crate) fn internal(&self, served: std::sync::Arc<Served>, namespace: &str, name: &str) -> Call {
        let (parts, ()) = http::Request::new(()).into_parts();
        Call {
            registry: self.registry(),
            served,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: None,
            query: super::Query::default(),
            accept: super::Accept::default(),
            parts,
            identity: Identity::in_process(),
            api: self.clone(),
        }
    }
}

impl Call {
    /// Answers a review (`TokenReview`, `SubjectAccessReview` and others) from the object that was sent. Nothing is
    /// stored.
    pub(crate) fn review(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let expected = Expected::of(&self.served, &self.registry);
        let headers = &self.parts.headers;
        let mut review = object::decode(headers, bytes, &expected, FieldValidation::Ignore, &mut Vec::new())?;
        self.check_review(&review)?;
        object::metadata(&mut review).remove("creationTimestamp");
        if &*self.served.resource.kind == "SelfSubjectReview" {
            object::metadata(&mut review).insert("creationTimestamp".to_owned(), object::now().into());
        }
        let status = match &*self.served.resource.kind {
            "TokenReview" => self.token_review(&review),
            "SelfSubjectReview" => json!({ "userInfo": user_info(&self.identity) }),
            "SelfSubjectRulesReview" => json!({
                "resourceRules": [{ "verbs": ["*"], "apiGroups": ["*"], "resources": ["*"] }],
                "nonResourceRules": [{ "verbs": ["*"], "nonResourceURLs": ["*"] }],
                "incomplete": false,
            }),
            // Whoever is known may do everything: roles are kept, not enforced.
            _ => json!({ "allowed": true }),
        };
        review["status"] = status;
        Ok(content::respond(201, self.accept, &review))
    }

    fn check_review(&self, review: &Value) -> Answer<()> {
        match &*self.served.resource.kind {
            "TokenReview" if read::text(review, &["spec", "token"]).is_empty() => {
                Err(Failure::bad_request("token is required for TokenReview in authentication"))
            }
            "SelfSubjectAccessReview" | "SubjectAccessReview" | "LocalSubjectAccessReview" => {
                let given = |field: &str| read::has(review, &["spec", field]);
                if given("resourceAttributes") != given("nonResourceAttributes") {
                    return Ok(());
                }
                let cause = Cause {
                    reason: CauseReason::Invalid,
                    message: "Invalid value: null: exactly one of nonResourceAttributes or resourceAttributes must be \
                              specified"
                        .to_owned(),
                    field: "spec.resourceAttributes".to_owned(),
                };
                Err(Failure::invalid_kind("authorization.k8s.io", "", "", &[cause]))
            }
            _ => Ok(()),
        }
    }

    fn token_review(&self, review: &Value) -> Value {
        let token = read::text(review, &["spec", "token"]);
        let audiences: Vec<String> = read::items(review, &["spec", "audiences"])
            .iter()
            .filter_map(|audience| audience.as_str().map(str::to_owned))
            .collect();
        let credentials = self.api.inner.options.credentials.as_ref();
        if let Some(identity) = credentials.and_then(|credentials| credentials.static_token(token)) {
            return json!({ "authenticated": true, "user": user_info(&identity), "audiences": audiences });
        }
        match self.api.authenticate(token, &audiences) {
            Ok((identity, audiences)) => {
                json!({ "authenticated": true, "user": user_info(&identity), "audiences": audiences })
            }
            // Why is nobody's business who guesses.
            Err(_) => json!({ "error": "invalid bearer token", "user": {} }),
        }
    }

    /// Issues a token for a service account.
    pub(crate) fn token(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let type_ = schema::built_in("authentication.k8s.io", "v1", "TokenRequest").unwrap_or_default();
        let expected = Expected {
            api_version: AUTHENTICATION_V1,
            kind: "TokenRequest",
            type_: &type_,
            registry: &self.registry,
        };
        let headers = &self.parts.headers;
        let mut request =
            object::decode(headers, bytes, &expected, FieldValidation::Ignore, &mut Vec::new())?;
        let Some(credentials) = &self.api.inner.options.credentials else {
            return Err(Failure::not_implemented("this server signs no tokens"));
        };
        let claims = self.claims(&request)?;
        let token = credentials.tokens().sign(&claims).ok_or_else(|| Failure::internal("cannot sign"))?;
        let end = Timestamp::from_second(claims.exp).map_err(Failure::internal)?;
        let spec = read::map(&mut request, &["spec"]);
        spec.insert("audiences".to_owned(), claims.aud.clone().into());
        spec.insert("expirationSeconds".to_owned(), (claims.exp - claims.iat).into());
        request["status"] = json!({ "token": token, "expirationTimestamp": time::write(end) });
        let metadata = object::metadata(&mut request);
        metadata.insert("name".to_owned(), self.name.as_str().into());
        metadata.insert("namespace".to_owned(), self.namespace.as_str().into());
        metadata.insert("creationTimestamp".to_owned(), object::now().into());
        metadata.insert("uid".to_owned(), claims.jti.into());
        Ok(content::respond(201, self.accept, &request))
    }

    fn claims(&self, request: &Value) -> Answer<Claims> {
        let seconds = read::number(request, &["spec", "expirationSeconds"]).unwrap_or(HOUR);
        let why = if seconds < SHORTEST {
            Some("may not specify a duration less than 10 minutes")
        } else if seconds > LONGEST {
            Some("may not specify a duration larger than 2^32 seconds")
        } else {
            None
        };
        if let Some(why) = why {
            let cause = Cause {
                reason: CauseReason::Invalid,
                message: format!("Invalid value: {seconds}: {why}"),
                field: "spec.expirationSeconds".to_owned(),
            };
            return Err(Failure::invalid_kind("authentication.k8s.io", "TokenRequest", "", &[cause]));
        }
        let account: Value = serde_json::from_slice(&self.current()?.bytes).map_err(Failure::internal)?;
        let mut aud: Vec<String> = read::items(request, &["spec", "audiences"])
            .iter()
            .filter_map(|audience| audience.as_str().map(str::to_owned))
            .collect();
        if aud.is_empty() {
            aud.push(ISSUER.to_owned());
        }
        let iat = Timestamp::now().as_second();
        let serviceaccount = Bound { name: self.name.clone(), uid: object::text(&account, "uid").to_owned() };
        let mut kubernetes = Bindings {
            namespace: self.namespace.clone(),
            serviceaccount,
            pod: None,
            secret: None,
            node: None,
        };
        self.bind_token(request, &mut kubernetes)?;
        Ok(Claims {
            aud,
            exp: iat + seconds,
            iat,
            iss: ISSUER.to_owned(),
            jti: object::new_uid()?,
            kubernetes,
            nbf: iat,
            sub: format!("system:serviceaccount:{}:{}", self.namespace, self.name),
        })
    }

    /// Binds a token to the pod, secret or node that is asked for, which must exist.
    fn bind_token(&self, request: &Value, bindings: &mut Bindings) -> Answer<()> {
        let reference = read::at(request, &["spec", "boundObjectRef"]);
        if reference.is_null() {
            return Ok(());
        }
        let name = read::text(reference, &["name"]);
        let plural = match read::text(reference, &["kind"]) {
            "Pod" => "pods",
            "Secret" => "secrets",
            "Node" => "nodes",
            other => {
                return Err(Failure::bad_request(format!(
                    "cannot bind token for serviceaccount {:?} to type {other:?}",
                    self.name
                )));
            }
        };
        let namespace = if plural == "nodes" { "" } else { self.namespace.as_str() };
        let served = self.registry.find("", "v1", plural).ok_or_else(Failure::no_such_path)?;
        let found = self.store().get(&Key::new(served.collection.clone(), namespace, name));
        let found = found.ok_or_else(|| Failure::not_found(&served.resource, name))?;
        let object: Value = serde_json::from_slice(&found.bytes).map_err(Failure::internal)?;
        let uid = object::text(&object, "uid");
        let wanted = read::text(reference, &["uid"]);
        if !wanted.is_empty() && wanted != uid {
            let why = format!(
                "the UID in the bound object reference ({wanted}) does not match the UID in record. The object might have been deleted and then recreated"
            );
            return Err(Failure::conflict(&served.resource, name, &why));
        }
        let account = read::text(&object, &["spec", "serviceAccountName"]);
        if plural == "pods" && account != self.name {
            return Err(Failure::bad_request(format!(
                "cannot bind token for serviceaccount {:?} to pod running with different serviceaccount name.",
                self.name
            )));
        }
        let bound = Some(Bound { name: name.to_owned(), uid: uid.to_owned() });
        match plural {
            "pods" => bindings.pod = bound,
            "secrets" => bindings.secret = bound,
            _ => bindings.node = bound,
        }
        Ok(())
    }
}

fn user_info(identity: &Identity) -> Value {
    let mut user = json!({ "username": identity.user, "groups": identity.groups });
    if !identity.uid.is_empty() {
        user["uid"] = identity.uid.as_str().into();
    }
    user
}
