{{/* Contradicting values: all of them in one message, each with its remedy. */}}
{{- define "kvplane.validate" -}}
{{- $wrong := list -}}
{{- range $check := list "store" "tls" "auth" "scale" "peers" "pods" "policy" "router" "worker" "ownership" "installed" -}}
{{- range $line := include (printf "kvplane.validate.%s" $check) $ | splitList "\n" -}}
{{- with trim $line }}{{ $wrong = append $wrong (printf "  - %s" .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\nkvplane: invalid values:\n%s\n" (join "\n" $wrong)) -}}
{{- end -}}
{{- end }}

{{- define "kvplane.validate.store" -}}
{{- $store := .Values.store }}
{{- $most := ternary (max (int .Values.autoscaling.maxReplicas) 1) (int .Values.replicas) .Values.autoscaling.enabled }}
{{- if and (gt (int $most) 1) (has $store.type (list "none" "sqlite")) }}
store.type: {{ $store.type }} is not shared, and there may be {{ $most }} service processes: use external (builtin for evaluation), or one process
{{- end }}
{{- if and (eq $store.type "external") (not $store.external.url) }}
store.external.url is empty: name the store, such as redis://HOST:6379
{{- end }}
{{- if and (ne $store.type "external") (or $store.external.url $store.external.existingSecret) }}
store.external is given, but store.type is {{ $store.type }}: set store.type=external, or remove it
{{- end }}
{{- if and $store.sealing.existingSecret (or (not $store.sealing.enabled) (eq $store.type "none")) }}
store.sealing.existingSecret is given, but nothing is sealed: set store.type and store.sealing.enabled, or remove it
{{- end }}
{{- if contains "@" $store.external.url }}
store.external.url contains a user: move it to store.external.existingSecret (usernameKey, passwordKey)
{{- end }}
{{- if and (not $store.external.existingSecret) (or $store.external.usernameKey $store.external.caKey $store.external.certKey $store.external.keyKey) }}
store.external names keys of a secret, but no existingSecret
{{- end }}
{{- if ne (empty $store.external.certKey) (empty $store.external.keyKey) }}
store.external has half a TLS pair: give certKey and keyKey, or neither
{{- end }}
{{- if eq $store.type "builtin" }}
{{- $units := dict "" 1.0 "b" 1.0 "k" 1e3 "kb" 1024.0 "m" 1e6 "mb" 1048576.0 "g" 1e9 "gb" 1073741824.0 }}
{{- $number := regexFind "^[0-9]+" $store.builtin.maxMemory }}
{{- $most := divf (mulf (float64 $number) (get $units (trimPrefix $number $store.builtin.maxMemory | lower))) 1048576.0 }}
{{- $limit := dig "limits" "memory" "" $store.builtin.resources }}
{{- if and $limit (gt $most (mulf 0.8 (include "kvplane.quantity" $limit | float64))) }}
store.builtin.maxMemory {{ $store.builtin.maxMemory }} is more than 80 % of resources.limits.memory {{ $limit }}: Valkey would be killed before it refuses writes; lower it, or raise the limit
{{- end }}
{{- end }}
{{- if and $store.external.caKey (not (hasPrefix "rediss" $store.external.url)) }}
store.external.caKey is given, but the url does not use TLS: begin it with rediss
{{- end }}
{{- end }}

{{- define "kvplane.validate.ownership" -}}
{{- $ownership := .Values.ownership }}
{{- if ne (eq $ownership.type "etcd") (not (empty $ownership.etcdUrls)) }}
ownership.etcdUrls names the members of etcd, and ownership.type is {{ $ownership.type }}: give etcdUrls with type etcd, and only then
{{- end }}
{{- if and (eq $ownership.type "etcd") (not (include "kvplane.sharesStore" .)) }}
ownership.type is etcd, but store.type {{ .Values.store.type }} is for one process: use external, or leave ownership.type lease
{{- end }}
{{- if and (include "kvplane.lease" .) (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) }}
serviceAccount.name is empty, so that every pod of the namespace could take the Lease: name an account, or set ownership.type=store
{{- end }}
{{- end }}

{{- define "kvplane.validate.policy" -}}
{{- $policy := .Values.networkPolicy }}
{{- if and $policy.enabled (include "kvplane.serves" .) (not $policy.clients) }}
networkPolicy.clients is empty, so that no engine could call the service: name the peers that may, such as {namespaceSelector: {}} for every pod of the cluster
{{- end }}
{{- if and $policy.enabled (include "kvplane.serves" .) .Values.metrics.enabled (not $policy.metricsClients) }}
networkPolicy.metricsClients is empty, so that nothing could read metrics: name the peers that may, or set metrics.enabled=false
{{- end }}
{{- end }}

{{- define "kvplane.validate.router" -}}
{{- $router := .Values.router }}
{{- if and $router.enabled (not $router.places) }}
router.places is empty: name the engines, as in docs/fleet.md
{{- end }}
{{- $names := list }}
{{- range $place := $router.places }}
{{- if has $place.name $names }}
router.places has two places of the name {{ $place.name }}: rename one
{{- end }}
{{- $names = append $names $place.name }}
{{- if and $router.enabled $place.service (include "kvplane.auth" $) (not $.Values.access.tokenKey) (not $.Values.access.certKey) }}
router.places follows {{ $place.name }} at a service, but has no token for it: name access.existingSecret and access.tokenKey
{{- end }}
{{- end }}
{{- if and $router.enabled (has (int $router.port) (list (int .Values.ports.health) (int .Values.ports.metrics))) }}
router.port must differ from ports.health and ports.metrics: they are ports of one pod
{{- end }}
{{- end }}

{{- define "kvplane.validate.tls" -}}
{{- $tls := .Values.tls }}
{{- $given := or $tls.existingSecret $tls.certManager.enabled }}
{{- if and $tls.enabled (not $given) (or (include "kvplane.serves" .) $tls.caKey) }}
tls.enabled without a certificate: name tls.existingSecret, or enable tls.certManager
{{- end }}
{{- if and $tls.existingSecret $tls.certManager.enabled }}
tls.existingSecret and tls.certManager both give a certificate: choose one
{{- end }}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) }}
tls.certManager.issuerRef.name is empty: name the issuer
{{- end }}
{{- if and (not $tls.enabled) (or $given (ne $tls.clientAuth "none") $tls.clientCA.existingSecret) }}
tls is set up but not enabled: set tls.enabled=true, or remove the other tls values
{{- end }}
{{- if and $tls.clientCA.existingSecret (eq $tls.clientAuth "none") }}
tls.clientCA is given, but clients need no certificate: set tls.clientAuth=require
{{- end }}
{{- end }}

{{- define "kvplane.validate.auth" -}}
{{- $auth := .Values.auth }}
{{- if and (not $auth.existingSecret) (or $auth.tokensKey $auth.jwksKey $auth.ownersKey $auth.jwtIssuer $auth.jwtAudience) }}
auth names keys or claims, but no existingSecret that holds them
{{- end }}
{{- if and $auth.existingSecret (not $auth.ownersKey) }}
auth.ownersKey is empty: name the key of the file with the owners
{{- end }}
{{- if and $auth.existingSecret (not $auth.tokensKey) (not $auth.jwksKey) (ne .Values.tls.clientAuth "require") }}
auth.existingSecret without a way to authenticate: name tokensKey or jwksKey, or set tls.clientAuth=require
{{- end }}
{{- if and $auth.jwksKey (not (and $auth.jwtIssuer $auth.jwtAudience)) }}
auth.jwksKey without jwtIssuer and jwtAudience: any token signed by these keys would be accepted; give both
{{- end }}
{{- if and (or $auth.jwtIssuer $auth.jwtAudience) $auth.existingSecret (not $auth.jwksKey) }}
auth.jwtIssuer and jwtAudience are claims of a JWT: name auth.jwksKey
{{- end }}
{{- $access := .Values.access }}
{{- if and (not $access.existingSecret) (or $access.tokenKey $access.certKey $access.keyKey) }}
access names keys of a secret, but no existingSecret
{{- end }}
{{- if ne (empty $access.certKey) (empty $access.keyKey) }}
access has half a TLS pair: give certKey and keyKey, or neither
{{- end }}
{{- if and $access.tokenKey (not .Values.tls.enabled) }}
access.tokenKey would cross the network in plain text: set tls.enabled=true
{{- end }}
{{- end }}

{{- define "kvplane.validate.scale" -}}
{{- $scale := .Values.autoscaling }}
{{- if and $scale.enabled (gt (int $scale.minReplicas) (int $scale.maxReplicas)) }}
autoscaling.minReplicas {{ int $scale.minReplicas }} is above maxReplicas {{ int $scale.maxReplicas }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) }}
metrics.serviceMonitor has no endpoint to scrape: set metrics.enabled=true
{{- end }}
{{- if and .Values.metrics.token.existingSecret (not .Values.metrics.enabled) }}
metrics.token protects nothing: set metrics.enabled=true
{{- end }}
{{- end }}

{{- define "kvplane.validate.peers" -}}
{{- $peers := .Values.peerServices }}
{{- if and $peers.enabled .Values.autoscaling.enabled }}
peerServices names the processes that `replicas` gives, and autoscaling.enabled starts and ends others: choose one
{{- end }}
{{- if and $peers.enabled .Values.config.peer_services }}
peerServices and config.peer_services both name the services to follow: choose one
{{- end }}
{{- if and $peers.existingSecret (not $peers.enabled) }}
peerServices.existingSecret is given, but nothing is followed: set peerServices.enabled=true, or remove it
{{- end }}
{{- if and $peers.enabled (include "kvplane.auth" .) (not $peers.existingSecret) (ne .Values.tls.clientAuth "require") }}
peerServices has no token for the other processes: name peerServices.existingSecret
{{- end }}
{{- if and $peers.existingSecret (not .Values.tls.enabled) }}
peerServices.existingSecret would cross the network in plain text: set tls.enabled=true
{{- end }}
{{- if and $peers.enabled .Values.tls.enabled (not .Values.tls.caKey) }}
peerServices cannot verify the other processes: name tls.caKey
{{- end }}
{{- end }}

{{- define "kvplane.validate.pods" -}}
{{- $ports := list (int .Values.ports.grpc) (int .Values.ports.health) (int .Values.ports.metrics) }}
{{- if ne (len (uniq $ports)) 3 }}
ports.grpc, ports.health and ports.metrics must differ: they are ports of one pod
{{- end }}
{{- $needed := add (int .Values.drain.preStopSeconds) (int .Values.drain.graceSeconds) }}
{{- with .Values.terminationGracePeriodSeconds }}
{{- if le (int64 .) (int64 $needed) }}
terminationGracePeriodSeconds {{ int . }} is not longer than a drain: give more than {{ $needed }} (drain.preStopSeconds + drain.graceSeconds)
{{- end }}
{{- end }}
{{- if and .Values.auditLog (ne .Values.auditLog "-") (not .Values.extraVolumeMounts) }}
auditLog is a file, and the root of the container is read-only: mount a volume with extraVolumes and extraVolumeMounts, or use "-"
{{- end }}
{{- range .Values.extraEnv }}
{{- $key := trimPrefix "KVPLANE_" .name | lower }}
{{- if and (hasPrefix "KVPLANE_" .name) (has $key (include "kvplane.chartKeys" $ | fromYamlArray)) }}
extraEnv sets {{ .name }}, which the chart sets: use the value for it (README.md lists them)
{{- end }}
{{- end }}
{{- end }}

{{- define "kvplane.validate.worker" -}}
{{- $worker := .Values.gpuWorker }}
{{- if $worker.service }}
{{- if ne $worker.mode "daemonset" }}
gpuWorker.service makes this a release of workers alone, but gpuWorker.mode is {{ $worker.mode }}: use daemonset, or remove it
{{- end }}
{{- $own := dict "store.type" (ne .Values.store.type "none") "auth.existingSecret" .Values.auth.existingSecret "autoscaling.enabled" .Values.autoscaling.enabled "tls.certManager.enabled" .Values.tls.certManager.enabled "metrics.serviceMonitor.enabled" .Values.metrics.serviceMonitor.enabled }}
{{- range $name, $given := $own }}
{{- if $given }}
{{ $name }} is of a service, but gpuWorker.service makes this a release of workers alone: set it in the release of the service
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq $worker.mode "daemonset") $worker.replica (not (contains "$(NODE_NAME)" $worker.replica)) }}
gpuWorker.replica is the same on every node, but a rank has one worker: include $(NODE_NAME)
{{- end }}
{{- if and (eq $worker.mode "sidecar") $worker.replica (not (contains "$(POD_NAME)" $worker.replica)) }}
gpuWorker.replica is the same in every pod, but a rank has one worker: include $(POD_NAME)
{{- end }}
{{- $tiers := $worker.tiers }}
{{- if and (eq $worker.mode "disabled") (or $tiers.hostMemory (ne $tiers.disk.type "none")) }}
gpuWorker.tiers are of workers, but gpuWorker.mode is disabled: set gpuWorker.mode, or remove them
{{- end }}
{{- if and (eq $tiers.disk.type "claim") (not $tiers.disk.size) }}
gpuWorker.tiers.disk.size is empty, but a claim has a size: give it, such as 500Gi, or use type hostPath
{{- end }}
{{- if and (eq $tiers.disk.type "none") (or $tiers.disk.size $tiers.disk.storageClassName) }}
gpuWorker.tiers.disk is given, but its type is none: set type=hostPath or type=claim, or remove it
{{- end }}
{{- if and (ne $tiers.disk.type "claim") $tiers.disk.storageClassName }}
gpuWorker.tiers.disk.storageClassName is of a claim, but the type is {{ $tiers.disk.type }}: set type=claim, or remove it
{{- end }}
{{- if and (eq $tiers.disk.type "hostPath") (eq $worker.mode "sidecar") }}
gpuWorker.tiers.disk.type hostPath is for workers on nodes, since pods of the service may not have one: use type claim, or mode daemonset
{{- end }}
{{- if and $tiers.hostMemory (ne $worker.mode "disabled") }}
{{- $needed := div (add (mul 5 (include "kvplane.mebibytes" $tiers.hostMemory | int64)) 3) 4 }}
{{- range $name := list "requests" "limits" }}
{{- $given := dig $name "memory" "" $worker.resources | toString }}
{{- if and $given (lt (include "kvplane.quantity" $given | int64) $needed) }}
gpuWorker.resources.{{ $name }}.memory {{ $given }} has no room for a host tier of {{ $tiers.hostMemory }}, which is at most 80 % of it: give at least {{ $needed }}Mi
{{- end }}
{{- end }}
{{- end }}
{{- if and $worker.resourceClaims (semverCompare "<1.31-0" .Capabilities.KubeVersion.Version) }}
gpuWorker.resourceClaims needs Kubernetes 1.31, this is {{ .Capabilities.KubeVersion.Version }}: use gpuWorker.runtimeClassName
{{- end }}
{{- if ne $worker.mode "disabled" }}
{{- if and (include "kvplane.auth" .) (not .Values.access.tokenKey) (not .Values.access.certKey) }}
gpuWorker has no token for the service: name access.existingSecret and access.tokenKey
{{- end }}
{{- if and (include "kvplane.auth" .) (not $worker.replica) (not .Values.access.replicaPrefix) }}
gpuWorker.replica is by default a name that no owner's default pattern NAME/* matches: set access.replicaPrefix, such as acme/, or gpuWorker.replica
{{- end }}
{{- if and (eq .Values.tls.clientAuth "require") (not .Values.access.certKey) }}
gpuWorker has no certificate for the service: name access.existingSecret, access.certKey and access.keyKey
{{- end }}
{{- end }}
{{- end }}
